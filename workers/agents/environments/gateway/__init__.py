"""The endpoint that agents talk to: one file for each protocol, around one path that samples and records tokens."""
