"""The aiohttp application: pages, metrics, TLS and passwords."""
