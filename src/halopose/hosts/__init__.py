"""Hosts: the only modules that know a framework. All other code uses the interface in ``hosts.base``."""
