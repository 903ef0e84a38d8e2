import asyncio
import collections
import os
import re
import signal
import time

MARK = "MYPR_MATRIX=" + os.urandom(8).hex()
SESSION = "XDG_RUNTIME_DIR=" + os.environ["XDG_RUNTIME_DIR"]
FORMS = ("string", "argv")
FEEDS = ("none", "input", "pipe", "pty")
SCRIPTS = {
    "exit 0": "exit 0",
    "exit 3": "echo out; echo err >&2; exit 3",
    "signal": "kill -SEGV $$",
    "timeout": "sleep 1000",
    "limit": "sleep 1000",
    "cancel": "echo up; sleep 1000",
    # One child leaves the session, one is a double fork; both ignore SIGTERM, and the
    # SIGHUP that a terminal sends when its first process ends.
    "escape": "trap '' TERM HUP; setsid sh -c 'trap \"\" TERM; echo up; while :; do sleep 1000; done' & "
    "(sh -c 'trap \"\" TERM; sleep 1000' &) ; exit 0",
    "flood": "head -c 20000000 /dev/zero",
}
WANT = {  # state, and the return code where it is certain
    "exit 0": ("succeeded", 0),
    "exit 3": ("failed", 3),
    "signal": ("failed", -signal.SIGSEGV),
    "timeout": ("cancelled", None),
    "limit": ("failed", None),
    "cancel": ("cancelled", None),
    "escape": ("cancelled", 0),
    "flood": ("succeeded", 0),
}
CANCEL_WITHIN = 30  # seconds; two of them are the patience with SIGTERM


async def case(form, feed, end):
    """One job of the matrix: None, or what is wrong."""
    script = SCRIPTS[end]
    if feed in ("input", "pipe"):
        script = 'read line; test "$line" = hello || exit 99; ' + script
    command = script if form == "string" else ["/bin/sh", "-c", script]
    name, value = MARK.split("=")
    kw = {"env": {name: value}, "inherit_env": True}
    if feed == "pty":
        kw["pty"] = True
    if feed == "input":
        kw["input"] = "hello\n"
    if end == "timeout" and feed != "pipe":  # run() has no pipe
        result = await ws.shell.run(command, timeout=0.1, **kw)
        job = ws.tasks.get(result["id"])
        if (result["state"], result["timed_out"]) != ("cancelled", True):
            return result
    else:
        if feed == "pipe":
            kw["stdin"] = True
        if end in ("timeout", "limit"):
            kw["limits"] = {"time": 0.1}
        job = await ws.shell.start(command, **kw)
        if feed == "pipe":
            try:
                await job.write("hello\n", eof=True)
            except ws.RPCError:  # its time was over first
                if end not in ("timeout", "limit"):
                    raise
        if end in ("cancel", "escape"):
            seen = await job.expect("up")
            if not seen["matched"]:
                return seen, job.status()
            if job.status()["status"] != "running":
                return "over while children live", job.status()
            began = time.monotonic()
            if not await job.cancel():
                return "cancel found it over", job.status()
            if time.monotonic() - began > CANCEL_WITHIN:
                return "cancel took long", time.monotonic() - began
        try:
            await job
        except (asyncio.CancelledError, ws.RPCError):
            pass
    s = job.status()
    state, code = WANT["limit" if end == "timeout" and feed == "pipe" else end]
    if s["status"] != state or code is not None and s["returncode"] != code:
        return s
    if end == "signal" and s["signal"] != "SIGSEGV":
        return s
    if end in ("timeout", "limit") and not s["timed_out"]:
        return s
    if end == "exit 3":
        text = job.output().replace("\r", "")
        if sorted(text.split()) != ["err", "out"]:
            return text
        if feed != "pty":
            out = (await job.read(stream="stdout"))["output"], (await job.read(stream="stderr"))["output"]
            if out != ("out\n", "err\n"):
                return out
    if end == "flood" and (s["output_bytes"], s["truncated"]) != (16 << 20, True):
        return s
    return None


def processes(mark):
    """The pids that have this in their environment."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as f:
                if mark.encode() in f.read().split(b"\0"):
                    found.append(int(pid))
        except OSError:
            pass
    return found


def descriptors():
    """The kinds of open files of every process of this session, by its pid and name."""
    table = {}
    for pid in processes(SESSION):
        kinds = collections.Counter()
        try:
            with open(f"/proc/{pid}/comm") as f:
                name = f.read().strip()
            for fd in os.listdir(f"/proc/{pid}/fd"):
                try:
                    kind = re.sub(r"[0-9a-f]{6,}|\d+", "N", os.readlink(f"/proc/{pid}/fd/{fd}"))
                except OSError:
                    continue
                # A pool, which grows to its size; and what the kernel takes once, a little after its start.
                if "history.sqlite" not in kind and "/kernel-N" not in kind:
                    kinds[kind] += 1
        except OSError:
            continue
        table[pid, name] = kinds
    return table


async def leftovers(before):
    """What is there that was not before, once it had time to go."""
    until = time.monotonic() + 60
    while True:
        left = [f"process left: {pid}" for pid in processes(MARK)]
        units = [s["id"] for s in (await ws.call("jobs.list", {"active": True}, True))["jobs"]]
        left += [f"active: {id}" for id in units]
        now = descriptors()
        for process, kinds in now.items():
            more = kinds - before.get(process, collections.Counter())
            left += [f"descriptors left in {process}: {dict(more)}"] if more else []
        if not left or time.monotonic() > until:
            return left
        await ws.shell.run("true")


async def matrix():
    # What is opened once and kept, such as the files of the database, is no leak.
    await asyncio.gather(*(case("string", feed, "exit 3") for feed in FEEDS))
    await ws.shell.run("true")
    await asyncio.sleep(0.5)  # a moment after its loop began, the kernel locks its sources
    before = descriptors()
    problems = []
    for end in SCRIPTS:
        cells = [(form, feed, end) for form in FORMS for feed in FEEDS]
        for cell, wrong in zip(cells, await asyncio.gather(*(case(*cell) for cell in cells))):
            problems += [f"{' × '.join(cell)}: {wrong}"] if wrong is not None else []
    return problems + await leftovers(before)
