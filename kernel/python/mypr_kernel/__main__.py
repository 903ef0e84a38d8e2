"""``python -m mypr_kernel``: runs until it is told to stop. See the package's doc."""

from __future__ import annotations


def main() -> int:
    """Run the kernel that the environment describes and return the exit status.

    0 after an orderly stop, 2 when the environment lacks something, 3 when the manager
    rejected this kernel.
    """
    from .kernel import main

    return main()


if __name__ == "__main__":
    import sys

    sys.exit(main())
