"""`python -m paradec.cli` is the command `paradec`."""

from paradec.cli import app

if __name__ == "__main__":
    app(prog_name="paradec")
