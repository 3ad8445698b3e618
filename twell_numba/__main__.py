"""``python -m twell_numba``: the ``twell`` command where its script is not on the path."""

from twell_numba.cli import main

if __name__ == "__main__":
    main()
