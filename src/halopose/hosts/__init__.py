"""Hosts: the only places that know a framework. Everything else sees the contract in ``hosts.base``."""
