"""Parts of ``ws`` that need no manager: locks, loading modules, help, exceptions."""

from __future__ import annotations

from harness import Kernel

LOCKS = """
import asyncio
order = []
async def hold(tag, *names, timeout=None, inside=None):
    async with ws.locks.acquire(*names, timeout=timeout):
        order.append(tag)
        await (inside.wait() if inside else asyncio.sleep(0))
def owners(): return {r["name"]: (r["owner"] or {}).get("task") for r in ws.locks.list()}
"""


def test_locks_are_granted_in_order_and_all_at_once(kernel: Kernel) -> None:
    kernel.run(LOCKS)
    cell = kernel.run(
        "gate = asyncio.Event()\n"
        "a = ws.tasks.start(hold('a', 'x', 'y', inside=gate), task_id='a'); await asyncio.sleep(0)\n"
        "b = ws.tasks.start(hold('b', 'y', 'z'), task_id='b'); await asyncio.sleep(0)\n"
        # z is free, but b asked for it first, together with y.
        "c = ws.tasks.start(hold('c', 'z'), task_id='c'); await asyncio.sleep(0)\n"
        "d = ws.tasks.start(hold('d', 'w'), task_id='d'); await d\n"
        "held, waits = owners(), [len(r['waiters']) for r in ws.locks.list()]\n"
        "gate.set()\n"
        "for t in (a, b, c): await t\n"
        "order, held, waits, ws.locks.list()"
    )
    assert cell.result == ("(['a', 'd', 'b', 'c'], {'x': 'task a', 'y': 'task a', 'z': None}, [0, 1, 2], [])")


def test_locks_end_with_their_task(kernel: Kernel) -> None:
    kernel.run(LOCKS)
    cell = kernel.run(
        "forever = asyncio.Event()\n"
        "a = ws.tasks.start(hold('a', 'x', inside=forever), task_id='a'); await asyncio.sleep(0)\n"
        "b = ws.tasks.start(hold('b', 'x'), task_id='b'); await asyncio.sleep(0)\n"
        "c = ws.tasks.start(hold('c', 'x'), task_id='c'); await asyncio.sleep(0)\n"
        "await b.cancel()\n"
        "await a.cancel()\n"
        "await c\n"
        "async def leaks(): await ws.locks.acquire('x').__aenter__()\n"
        "await ws.tasks.start(leaks(), task_id='l')\n"
        "async with ws.locks.acquire('x', timeout=5): pass\n"
        "order, owners()"
    )
    assert cell.result == "(['a', 'c'], {})"


def test_lock_timeout_names_the_owner(kernel: Kernel) -> None:
    kernel.run(LOCKS)
    kernel.run(
        "forever = asyncio.Event()\n"
        "a = ws.tasks.start(hold('a', 'x', inside=forever), task_id='a'); await asyncio.sleep(0)",
        client="calm-otter",
    )
    cell = kernel.run("async with ws.locks.acquire(' x ', 'y', timeout=0.01): pass")
    assert cell.error == "TimeoutError: 'x', 'y' not acquired within 0.01 s; held by calm-otter"
    assert kernel.run("owners()").result == "{'x': 'task a'}"
    cell = kernel.run(
        "async with ws.locks.acquire('p'):\n    async with ws.locks.acquire('q'): pass",
    )
    assert cell.error == (
        "RuntimeError: this task holds 'p': acquire all locks that are needed together at once"
    )
    cell = kernel.run("await ws.locks.acquire('p')")
    assert cell.error == "TypeError: locks are held for a block: async with ws.locks.acquire(...):"
    assert kernel.run("owners()").result == "{'x': 'task a'}"


def test_failed_reload_keeps_what_was_there(kernel: Kernel) -> None:
    lib = kernel.workspace / ".mypr" / "lib" / "ws_lib"
    (lib / "sub").mkdir(parents=True)
    (lib / "__init__.py").write_text("")
    (lib / "sub" / "deep.py").write_text("from ws_lib import helpers\nvalue = helpers.value + 1\n")
    (lib / "helpers.py").write_text("import sys\nvalue = 1\nme = sys.modules[__name__].value\n")
    assert kernel.run("h = ws.modules.load('helpers'); h.value, h.me, h.__name__").result == (
        "(1, 1, 'ws_lib.helpers')"
    )
    (lib / "helpers.py").write_text("import sys\nvalue = 2\nraise OSError('no')\n")
    assert kernel.run("ws.modules.reload('helpers')").error == "OSError: no"
    assert (
        kernel.run("import ws_lib.helpers; ws_lib.helpers is h, ws_lib.helpers.value").result == "(True, 1)"
    )
    # The same size within the same second: no stale bytecode.
    (lib / "helpers.py").write_text("import sys\nvalue = 7\nme = sys.modules[__name__].value\n")
    assert kernel.run("n = ws.modules.reload('helpers'); n.value, h.value, ws_lib.helpers is n").result == (
        "(7, 1, True)"
    )
    assert kernel.run("ws.modules.load('sub.deep').value").result == "8"
    assert kernel.run("[(m['name'], m['loaded']) for m in ws.modules.list()]").result == (
        "[('helpers', True), ('sub.deep', True)]"
    )


def test_module_names_stay_inside(kernel: Kernel) -> None:
    lib = kernel.workspace / ".mypr" / "lib" / "ws_lib"
    lib.mkdir(parents=True)
    (kernel.workspace / "outside.py").write_text("raise AssertionError")
    (lib / "link.py").symlink_to(kernel.workspace / "outside.py")
    for name in ("../outside", "..outside", "a/b", "_x", "a._x", "class", "", "a b", "link", "os.path"):
        cell = kernel.run(f"ws.modules.load({name!r})")
        assert cell.error.startswith(("ValueError", "LookupError")), (name, cell.error)
    assert kernel.run("ws.modules.list()").result == "[]"


def test_help_names_what_exists(kernel: Kernel) -> None:
    index = kernel.run("print(ws.help())").text()
    for name in ("shell", "tasks", "history", "messages", "locks", "skills", "modules", "packages"):
        assert f"ws.{name} " in index
        page = kernel.run(f"print(ws.help({name!r}))").text()
        assert page.startswith(f"ws.{name}: ")
        assert "._" not in page
    assert (kernel.run("ws.help('shell.start')").result or "").startswith(
        "await ws.shell.start(command, *, cwd=None"
    )
    assert (kernel.run("ws.help('handle.expect')").result or "").startswith("await handle.expect(pattern, ")
    assert kernel.run("ws.help('nothing')").error.startswith(
        "ValueError: there is no topic 'nothing'; there are: "
    )
    assert "private" in kernel.run("ws.help('tasks._registry')").error


def test_the_name_can_be_had_again(kernel: Kernel) -> None:
    assert kernel.run("ws = 1; ws").result == "1"
    assert kernel.run("ws").result == "1"  # it is theirs
    assert kernel.run("del ws").error == ""
    assert kernel.run("ws").result.startswith("<workspace ")


def test_exceptions_are_found_on_ws(kernel: Kernel) -> None:
    cell = kernel.run(
        "issubclass(ws.ShellError, ws.RPCError), ws.NotReady.__name__, ws.ResultUnavailable.__name__,"
        "issubclass(ws.InvalidCursor, ValueError)"
    )
    assert cell.result == "(True, 'NotReady', 'ResultUnavailable', True)"
    assert "ws has no attribute 'nothing'" in kernel.run("ws.nothing").error
