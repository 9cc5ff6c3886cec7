"""`python -m meshtune` is `meshtune`."""

from meshtune.cli.main import main

if __name__ == "__main__":
    main()
