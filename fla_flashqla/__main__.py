# SPDX-License-Identifier: MIT
"""`python -m fla_flashqla`: the same as the command `fla-flashqla`."""

from fla_flashqla.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
