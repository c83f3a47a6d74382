"""The code that the processes share: the model, the dialects, the settings, the API client and the `mgpu` command.

`scheduler`, `webhook`, `deviceplugin` and `playground` import this package, which imports none of them. Code that
places pods, answers admission reviews or talks to a kubelet does not belong here.
"""
