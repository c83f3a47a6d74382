"""The node agent: hands exactly the decided cards to each container."""
