"""Images, compose services and the scripts that run inside them."""
