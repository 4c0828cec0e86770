"""The web console: a live view of the fleet and its events on a frontend's admin port.

    memory.py ──▶ picture.py ──▶ rows.py ──▶ feed.py ──▶ endpoints.py ──▶ console.js
    keeps events    converts       finds the   sends rows   serves HTTP     draws the page
    while there     state and      changed     to all
    is no viewer    events to      rows        viewers
                    rows

An arrow points to the module that uses the data. `history.py` reads the journal with a command in a separate process.
`endpoints.py` also decides which requests are answered and which actions are allowed. `controller/processes/operating` creates
the console of a frontend.
"""
