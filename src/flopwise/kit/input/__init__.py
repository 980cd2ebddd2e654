"""Input: batches reach the device while it computes, from memory that is page-locked once."""
