"""Frozen, versioned records that cross rooms and go to disk.

They are plain dataclasses of the standard library, because the process that trains writes some of them and must not
need anything beyond torch; reading is typed and strict (`records.store`).
"""
