"""``ws.help``: the API as it is, from its own signatures and docstrings."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .workspace import Workspace

# Returned by other objects, so not found by walking ws.
HANDLES = "handle"


class Text(str):
    """Text that shows as itself when it is the result of a cell."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def text(ws: Workspace, topic: str | None) -> Text:
    """The index, a topic, or one method."""
    if topic is None:
        return Text(_index(ws))
    if not isinstance(topic, str):
        raise TypeError(f"a topic is text, not {type(topic).__name__}")
    name = topic.strip().removeprefix("ws.").removesuffix("()")
    if not name:
        return Text(_index(ws))
    parts = name.split(".")
    if any(part.startswith("_") for part in parts):
        raise ValueError(f"{topic!r} is private")
    target: Any = _handle() if parts[0] == HANDLES else _member(ws, parts[0])
    for part in parts[1:]:
        target = getattr(target, part, None) if target is not None else None
    if target is None:
        known = ", ".join([*_topics(ws), HANDLES])
        raise ValueError(f"there is no topic {topic!r}; there are: {known}, and each of their methods")
    shown = name if parts[0] == HANDLES else f"ws.{name}"
    if _is_part(target):
        return Text(_part(shown, target))
    return Text(_method(shown, target))


def _handle() -> Any:
    from .shell import Job

    return Job


def _member(ws: Workspace, name: str) -> Any:
    """An attribute of ws; properties that need a cell are described, not read."""
    member = getattr(type(ws), name, None)
    if isinstance(member, property) and not _lazy(member):
        return member
    return getattr(ws, name, None)


def _lazy(member: property) -> bool:
    """Whether a property is a part of the API that is imported when it is needed."""
    return member.fget is not None and "_part" in member.fget.__code__.co_names


def _topics(ws: Workspace) -> list[str]:
    """The parts of ws that have methods of their own."""
    names = [n for n in ws.__dict__ if not n.startswith("_")]
    names += [n for n, m in vars(type(ws)).items() if isinstance(m, property) and _lazy(m)]
    return sorted(set(names))


def _is_part(target: Any) -> bool:
    if isinstance(target, type):
        return True
    return type(target).__module__.startswith(__package__ or "") and not callable(target)


def _index(ws: Workspace) -> str:
    lines = ['ws: the workspace. ws.help("shell") shows a topic, ws.help("shell.run") a method.', ""]
    for name in _topics(ws):
        lines.append(f"ws.{name:<10} {_first(getattr(ws, name))}")
    lines.append(f"{HANDLES:<13} {_first(_handle())} Made by ws.shell.start and others.")
    lines.append("")
    for name in _own(ws):
        member = getattr(type(ws), name)
        if isinstance(member, property):
            lines.append(f"ws.{name}: {_first(member)}")
        else:
            lines.append(f"{_signature(f'ws.{name}', getattr(ws, name))}: {_first(member)}")
    return "\n".join(lines)


def _own(ws: Workspace) -> list[str]:
    return [
        name
        for name, member in vars(type(ws)).items()
        if not name.startswith("_")
        and (callable(member) or (isinstance(member, property) and not _lazy(member)))
    ]


def _part(name: str, target: Any) -> str:
    import inspect

    lines = [f"{name}: {inspect.getdoc(target) or ''}", ""]
    for member, value in inspect.getmembers(target):
        if member.startswith("_") or not callable(value) or isinstance(value, type):
            continue
        lines.append(f"{_signature(f'{name}.{member}', value)}")
        lines.append(f"    {_first(value)}")
    return "\n".join(lines)


def _method(name: str, target: Any) -> str:
    import inspect

    doc = inspect.getdoc(target) or ""
    head = _signature(name, target) if callable(target) else name
    return f"{head}\n\n{doc}"


def _signature(name: str, function: Any) -> str:
    import inspect

    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return f"{name}(…)"
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    if parameters and parameters[0].name == "self":
        del parameters[0]
    shown = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    wait = "await " if inspect.iscoroutinefunction(function) else ""
    return f"{wait}{name}{shown}"


def _first(target: Any) -> str:
    """The first sentence of a docstring."""
    import inspect

    doc = " ".join((inspect.getdoc(target) or "").split("\n\n")[0].split())
    end = doc.find(". ")
    return doc[: end + 1] if end >= 0 else doc
