"""Spares: the workers that are kept back, and the workers that they replace.

Revision: 0002, after 0001.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

FLEET_NOW = """
    VIEW fleet_now AS
        SELECT w.worker, w.instance, w.model, w.url, w.health, w.weight, w.routable, w.reason, w.drain,
               b.position AS breaker, b.retry_at, w.last_canary, w.joined{spares}
        FROM workers w LEFT JOIN breakers b USING (worker)
"""
MODEL_CAPACITY = """
    VIEW model_capacity AS
        SELECT model, count(*){active} AS workers, count(*) FILTER (WHERE routable) AS routable,
               sum(weight) AS weight, max(level) AS level, max(ratio) AS ratio{spares}
        FROM workers LEFT JOIN levels USING (model) GROUP BY model
"""


def upgrade() -> None:
    op.add_column("workers", sa.Column("spare", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("workers", sa.Column("place", sa.Text, nullable=False, server_default=""))
    # Replaced, not recreated: this keeps grants on them.
    op.execute("CREATE OR REPLACE" + FLEET_NOW.format(spares=", w.spare, w.place"))
    ready = ", count(*) FILTER (WHERE spare AND health = 'HEALTHY') AS spares"
    op.execute("CREATE OR REPLACE" + MODEL_CAPACITY.format(active=" FILTER (WHERE NOT spare)", spares=ready))


def downgrade() -> None:
    op.execute("DROP VIEW model_capacity")
    op.execute("DROP VIEW fleet_now")
    op.drop_column("workers", "place")
    op.drop_column("workers", "spare")
    op.execute("CREATE" + FLEET_NOW.format(spares=""))
    op.execute("CREATE" + MODEL_CAPACITY.format(active="", spares=""))
