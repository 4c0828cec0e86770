"""The web console: a live view of the fleet and its events on a frontend's admin port.

    memory.py ──▶ picture.py ──▶ sections.py ──▶ feed.py ──▶ endpoints.py ──▶ console.js
    events kept     fold and       changed         shared by    HTTP            draws the page
    without         events as      rows            all viewers
    viewers         rows

`history.py` reads the journal with a command in a separate process. `guard.py` decides which requests are answered, `actions.py`
which actions are allowed. Composed in `controller/processes/operating`.
"""
