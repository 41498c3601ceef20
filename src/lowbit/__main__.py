"""`python -m lowbit`: the command."""

from lowbit.cli import main

if __name__ == "__main__":
    main()
