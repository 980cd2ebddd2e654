"""Values of the loss that the script only shows: where it reads them, what it does with them, and their copies on the way."""
