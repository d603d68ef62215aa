"""Shards on web servers and in object stores: fetched whole into a bounded cache, then read like
local ones.

`urls` says which addresses are taken, `store` talks to servers, `cache` keeps what was fetched.
"""
