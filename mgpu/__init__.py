"""The shared model of mgpu: cards, asks and the ledger, the dialects, the settings, the `mgpu` command.

Limits: nothing here decides where a pod goes (`scheduler`), answers admission (`webhook`) or talks to a
kubelet (`deviceplugin`); those three import this package and never one another.
"""
