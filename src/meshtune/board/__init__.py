"""The board: a web page for tuning, over files that the runs write. It holds no state itself (docs/board.md)."""
