"""Reference trainers: each is written to be read, copied and changed, and uses the public package only."""
