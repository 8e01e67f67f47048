"""Limits of what the files of other people may say, checked before anything is made of them."""
