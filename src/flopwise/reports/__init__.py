"""Records drawn for people: render(record) -> str.

Reports compute nothing beyond formatting, and shares of the numbers that they are given.
"""
