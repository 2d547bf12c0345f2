"""The entry point of `python -m parity_audit`."""

from parity_audit.cli.app import main

if __name__ == "__main__":
    main()
