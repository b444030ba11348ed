"""Programs that show the package at work; each folder is one program, and the library never imports them."""
