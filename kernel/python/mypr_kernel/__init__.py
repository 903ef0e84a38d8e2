"""The Python kernel of mypr-mcp: one process that runs the cells of a workspace.

It owns the namespace that all clients share, the asyncio loop, the output of cells and
the connection to the manager (docs/PROTOCOL.md, "Kernel socket"). It does not own files,
processes, history or messages: those are the manager's, reached through ``ws``.

Modules, in the order in which a cell meets them:

========================  ==========================================================
``kernel``                start-up, the main thread's loop, the life of a cell
``link``, ``outbox``      the I/O thread: socket, ring of events, captured fds
``watch``, ``turn``       its eye on the loop: blocked or not, interrupts, watchdog
``wire``                  one JSON object per line
``cells``                 a cell, the owner of output; compilation
``streams``, ``display``  where ``print`` and rich objects go
``errors``                tracebacks and the one-line summary
``interrupts``            SIGINT that hits one cell and nothing else
``ipython``, ``mpl``      IPython and matplotlib, when they are there
``workspace``, ``calls``  ``ws`` and the requests behind it; ``fs``, ``git``, ``shell``,
                          ``history`` and so on are its parts
``registry``, ``tasks``   handles: cells and work that outlives them
``hooks``                 what is patched into modules when (and only if) they load
========================  ==========================================================

Start-up is part of the interface: a first plain cell must come back within three bare
interpreter starts. So nothing here imports at module level what costs a millisecond
(``asyncio``, ``json``, ``re``, ``enum``, ``socket``, ``threading``, ``typing`` all do);
C modules below them (``_socket``, ``_json``, ``_thread``) are used directly.
"""
