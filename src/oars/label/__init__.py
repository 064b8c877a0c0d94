"""``oars label``: a page where people label images in groups, with a model that learns as they do (docs/label.md).

The room stands above ``data``, which reads the images. What people do is an event in a log that only grows
(``log.py``); what is known of the rows is a fold of these events (``state.py``). Pixels are looked at in child
processes only (``pictures.py``, ``compute.py``): a damaged image ends a child, not the server. ``learner.py`` fits a
small model to the labels after each action. ``server.py`` is what the browser talks to.
"""
