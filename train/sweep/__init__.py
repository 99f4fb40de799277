"""`draftsmith sweep`: recipe values chosen by successive halving."""
