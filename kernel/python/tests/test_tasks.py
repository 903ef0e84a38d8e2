"""``ws.tasks``: detached tasks and the handles of cells."""

from __future__ import annotations

from harness import DEADLINE, Kernel, Message


def no_jobs(kernel: Kernel) -> None:
    """Answer every question for jobs: there are none."""
    answered: set[int] = set()

    def answer(message: Message) -> bool:
        if message["type"] == "call" and message["id"] not in answered:
            answered.add(message["id"])
            kernel.send({"type": "call_result", "id": message["id"], "result": {"jobs": []}})
        return False

    kernel.listen(answer)


def test_task_prints_to_its_handle_and_to_the_manager(shared: Kernel) -> None:
    cell = shared.run(
        "import asyncio, sys\n"
        "async def work():\n"
        "    print('from the task'); await asyncio.sleep(0.05); print('late', file=sys.stderr); return 5\n"
        "t = ws.tasks.start(work())\n"
        "t.id, t.status()['status']",
        client="calm-otter",
    )
    generation = shared.generation
    assert cell.result == f"('task-{generation}-1', 'running')"
    ident = f"python:{generation}:task-{generation}-1"
    begin = shared.wait_for(lambda m: m.get("event") == "task" and m["exec_id"] == ident)
    assert begin["task"]["client_id"] == "calm-otter"
    assert begin["task"]["exec_id"] == cell.events[0]["exec_id"]
    assert shared.wait_state(ident)["state"] == "succeeded"
    task = shared.cell(ident)
    assert (task.text(), task.text("stderr")) == ("from the task\n", "late\n")
    assert shared.cell(cell.events[0]["exec_id"]).text() == ""
    got = shared.run("t.result(), t.output(), t.output(cursor=14), (await t)")
    assert got.result == (
        "(5, 'from the task\\nlate\\n', {'output': 'late\\n', 'cursor': 19, 'truncated': False}, 5)"
    )


def test_result_of_what_runs_failed_and_was_cancelled(shared: Kernel) -> None:
    shared.run(
        "import asyncio\n"
        "async def bad(): raise ValueError('no')\n"
        "a = ws.tasks.start(asyncio.sleep(100)); b = ws.tasks.start(bad())\n"
        "await asyncio.wait_for(asyncio.wait([asyncio.ensure_future(b._end())]), 60)"
    )
    assert "NotReady: python" in shared.run("a.result()").error
    assert "ValueError: no" in shared.run("b.result()").error
    assert "ValueError: no" in shared.run("await b").error
    assert shared.run("await a.cancel(), a.status()['status'], await a.cancel()").result == (
        "(True, 'cancelled', False)"
    )
    assert shared.run("try:\n    await a\nexcept asyncio.CancelledError as e: print('yes', e)").text() == (
        "yes CancelledError: it was cancelled through its handle\n"
    )


def test_cancelled_before_the_first_step(shared: Kernel) -> None:
    cell = shared.run(
        "import asyncio, gc, warnings\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    t = ws.tasks.start(asyncio.sleep(1)); c = await t.cancel(); gc.collect()\n"
        "c, t.status()['status'], [str(w.message) for w in seen]"
    )
    assert cell.result == "(True, 'cancelled', [])"


def test_ids(shared: Kernel) -> None:
    cell = shared.run(
        "import asyncio\n"
        "def attempt(id):\n"
        "    try:\n"
        "        ws.tasks.start(asyncio.sleep(0), task_id=id); return 'ok'\n"
        "    except (ValueError, TypeError) as e: return type(e).__name__\n"
        "r = [attempt(i) for i in ('mine', 'mine', '', 'a'*32, 'task-x-1', 'task-x', 'python:ab:c', 'python:x',\n"
        "     'remote-watch:1', 7, 'a\\nb', 'x'*257)]\n"
        "ws.tasks.start(asyncio.sleep(0), task_id='hidden', visible=False)\n"
        "r, attempt('hidden')"
    )
    v, ok = "ValueError", "ok"
    assert cell.result == str(([ok, v, v, v, v, ok, v, ok, v, "TypeError", v, v], v))


def test_hidden_task_is_nobodys_business(kernel: Kernel) -> None:
    no_jobs(kernel)
    cell = kernel.run(
        "import asyncio\n"
        "async def work(): print('secret'); await asyncio.sleep(0); return 1\n"
        "t = ws.tasks.start(work(), visible=False); r = await t\n"
        "r, t.output(), [s['id'] for s in ws.tasks.list() if s['kind'] == 'python'], ws.tasks.get(t.id) is t"
    )
    assert cell.result == "(1, 'secret\\n', [], True)"
    assert cell.text() == ""
    with kernel.changed:
        assert not [m for m in kernel.messages if m.get("event") == "task"]


def test_lists_and_cells(kernel: Kernel) -> None:
    no_jobs(kernel)
    first = kernel.run("40 + 2;", client="a")
    ident = first.events[0]["exec_id"]
    kernel.run("import asyncio\nt = ws.tasks.start(asyncio.sleep(100), task_id='long')", client="b")
    cell = kernel.run(
        f"[s['id'] for s in ws.tasks.list(client_id='b')][-1], [h.id for h in ws.tasks.active()][0],"
        f"ws.tasks.get({ident!r}).result(), ws.tasks.get({ident!r}).status()['kind'], await ws.tasks.get({ident!r})"
    )
    assert cell.result == "('long', 'long', 42, 'cell', 42)"
    assert "KeyError" in kernel.run("ws.tasks.get('nobody')").error
    assert "cannot wait for its own end" in kernel.run("await ws.tasks.active()[-1]").error


def test_completed_handles_are_forgotten(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with Kernel(tmp_path, limits={"completed_tasks": 3}) as kernel:
        no_jobs(kernel)
        cell = kernel.run(
            "import asyncio\n"
            "ts = [ws.tasks.start(asyncio.sleep(0, i), task_id=f't{i}') for i in range(6)]\n"
            "for t in ts: await t\n"
            "[s['id'] for s in ws.tasks.list() if s['kind'] == 'python'], ts[0].result()"
        )
        assert cell.result == "(['t3', 't4', 't5'], 0)"


def test_read_and_expect(shared: Kernel) -> None:
    cell = shared.run(
        "import asyncio, sys\n"
        "async def talk():\n"
        "    print('login: ', end=''); await asyncio.sleep(0.05)\n"
        "    print('noise', file=sys.stderr); print('welcome é 7')\n"
        "    await asyncio.sleep(0.05); print('bye')\n"
        "t = ws.tasks.start(talk())\n"
        "a = await t.expect('login: ')\n"
        "b = await t.expect(r'welcome . (\\d)', a['cursor'], regex=True)\n"
        "c = await t.expect('nothing', b['cursor'])\n"
        "d = await t.read(b['cursor'])\n"
        "e = await t.read(stream='stderr')\n"
        "f = await t.expect('bye', max_scan_bytes=5)\n"
        "(a['reason'], b['match'], b['groups'], c['reason'], c['cursor'] == b['cursor'], d['output'], d['state'],\n"
        " e['output'], f['reason']).__repr__()"
    )
    assert cell.result == repr(
        str(("match", "welcome é 7", ["7"], "eof", True, "\nbye\n", "succeeded", "noise\n", "limit"))
    )
    cell = shared.run(
        "u = ws.tasks.start(asyncio.sleep(100))\n"
        "r = await u.expect('x', timeout=0.01), await u.read(wait_ms=0)\n"
        "bad = []\n"
        "for c in ('abc', 'mypr1.AAAA', e['cursor'], d['cursor']):\n"
        "    try: await u.read(c)\n"
        "    except ValueError as x: bad.append(type(x).__name__)\n"
        "await u.cancel()\n"
        "print(r[0]['reason'], r[1]['output'], r[1]['has_more'], bad)"
    )
    assert cell.text() == "timeout  False " + str(["InvalidCursor"] * 4) + "\n"


def test_cancelling_a_wait_leaves_the_task(shared: Kernel) -> None:
    cell = shared.run(
        "import asyncio\n"
        "t = ws.tasks.start(asyncio.sleep(100))\n"
        "for wait in (t.read(), t.expect('x'), t._wait()):\n"
        "    try: await asyncio.wait_for(wait, 0.01)\n"
        "    except asyncio.TimeoutError: pass\n"
        "s = t.status()['status']; await t.cancel(); s"
    )
    assert cell.result == "'running'"


def test_cells_as_handles_are_cancelled(shared: Kernel) -> None:
    waiting = shared.execute("import asyncio\nawait asyncio.sleep(100)")
    shared.wait_state(waiting, "running")
    cell = shared.run(f"h = ws.tasks.get({waiting!r}); (await h.cancel()), h.status()['status']")
    assert cell.result == "(True, 'cancelled')"
    assert shared.wait_state(waiting)["error"] == "CancelledError: cancelled by another cell"


def test_tasks_survive_a_new_manager(kernel: Kernel) -> None:
    kernel.run(
        "import asyncio\n"
        "gate = asyncio.Event()\n"
        "async def work():\n    print('before'); await gate.wait(); print('after'); return 1\n"
        "t = ws.tasks.start(work(), task_id='w')"
    )
    ident = f"python:{kernel.generation}:w"
    kernel.wait_text(ident, "before")
    kernel.drop()
    hello = kernel.connect()
    assert hello["cells"] == [{"exec_id": ident, "state": "running"}]
    assert hello["seen"] == [ident]
    kernel.run("gate.set()")
    assert kernel.wait_state(ident)["state"] == "succeeded"
    assert kernel.cell(ident).text() == "before\nafter\n"


def test_interrupt_hits_the_task_that_blocks(kernel: Kernel) -> None:
    kernel.run("import asyncio\nasync def spin():\n    print('on')\n    while True: pass\n")
    kernel.run("t = ws.tasks.start(spin(), task_id='s')")
    ident = f"python:{kernel.generation}:s"
    # Not what a slow machine says of the cells before.
    kernel.wait_for(
        lambda m: m["type"] == "loop" and m["blocked"] is not None and m["blocked"]["exec_id"] == ident
    )
    kernel.end(None, "interrupted")
    assert kernel.wait_state(ident)["state"] in ("failed", "cancelled")


def test_stop_says_so(kernel: Kernel) -> None:
    kernel.run("import asyncio\nt = ws.tasks.start(asyncio.sleep(100), task_id='w')")
    kernel.process.terminate()
    state = kernel.wait_state(f"python:{kernel.generation}:w")
    assert state["state"] == "cancelled"
    assert "told to stop" in state["error"]
    assert kernel.process.wait(DEADLINE) == 0


def test_output_of_sync_questions(kernel: Kernel) -> None:
    """A method without await asks the manager and blocks until it answers."""
    waiting = kernel.execute("ws.tasks.list()[-1]['id']")
    call = kernel.wait_for(lambda m: m["type"] == "call")
    assert call["method"] == "jobs.list"
    job = {"id": "a" * 32, "state": "running", "created_at": 9e9, "client_id": "x", "kind": "shell"}
    kernel.send({"type": "call_result", "id": call["id"], "result": {"jobs": [job]}})
    assert kernel.wait_state(waiting)["state"] == "succeeded"
    assert kernel.cell(waiting).result == repr("a" * 32)
    waiting = kernel.execute("ws.tasks.get('b' * 32)")
    call = kernel.wait_for(lambda m: m["type"] == "call" and m["params"].get("ids") == ["b" * 32])
    error = {"code": "invalid_request", "message": "no", "hint": "do not"}
    kernel.send({"type": "call_result", "id": call["id"], "error": error})
    assert kernel.wait_state(waiting)["error"] == "mypr_kernel.calls.InvalidRequestError: no (do not)"


def test_sync_question_can_be_interrupted_and_survives_a_manager(kernel: Kernel) -> None:
    waiting = kernel.execute("ws.tasks.list()")
    kernel.wait_for(lambda m: m["type"] == "call")
    kernel.drop()
    kernel.connect()
    seen = len([m for m in kernel.messages if m["type"] == "call"])
    assert seen >= 1
    kernel.wait_for(lambda m: m["type"] == "call" and kernel.messages.index(m) >= 0)
    kernel.end(waiting, "interrupted")
    assert kernel.wait_state(waiting)["state"] == "cancelled"


def test_no_task_begins_while_the_session_is_about_to_end(kernel: Kernel) -> None:
    kernel.run("import asyncio\nt = ws.tasks.start(asyncio.sleep(100), task_id='old')")
    kernel.send({"type": "reserve", "id": 7, "reason": "the session is about to be reset"})
    kernel.wait_for(lambda m: m["type"] == "reserved" and m["id"] == 7)
    with kernel.changed:  # what had begun is known by then
        kinds = [m.get("event") or m["type"] for m in kernel.messages]
    assert kinds.index("task") < kinds.index("reserved")
    cell = kernel.run("ws.tasks.start(asyncio.sleep(0), task_id='new')")
    assert "no task is started: the session is about to be reset" in cell.error
    kernel.send({"type": "release"})
    assert kernel.run("await ws.tasks.start(asyncio.sleep(0, 3), task_id='new')").result == "3"
