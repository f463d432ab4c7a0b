"""The automations of `infra/automations.yaml`, declared to a Prefect server."""

from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound

from hidden_states.errors import ServerError

FILE = Path(__file__).parents[1] / "infra" / "automations.yaml"
SUBJECT = "Eyas: {{ automation.name }}"
BODY = (
    "{{ automation.description }}\n\n{{ event.event }} at {{ event.occurred }}\n{{ event.resource | tojson }}\n"
    "{{ event.payload | tojson }}"
)


def read_automations(notify: UUID | None = None) -> list[AutomationCore]:
    """The file's automations.

    Args:
        notify: id of a notification block that each tells besides what it does.
    """
    found = []
    for entry in yaml.safe_load(FILE.read_text(encoding="utf-8"))["automations"]:
        actions: list[dict[str, Any]] = entry["actions"]
        if notify is not None:
            told = {"type": "send-notification", "block_document_id": str(notify), "subject": SUBJECT, "body": BODY}
            actions = [action for action in actions if action["type"] != "do-nothing"] + [told]
        found.append(AutomationCore.model_validate({**entry, "actions": actions}))
    return found


def declare(notify: str | None = None) -> list[str]:
    """Make the server's automations those of the file; others are left alone. Returns their names.

    Args:
        notify: `<block type>/<block name>` of the notification block, for example `slack-webhook/team`.

    Raises:
        ServerError: there is no such block.
    """
    with get_client(sync_client=True) as client:
        wanted = read_automations(_block(client, notify) if notify else None)
        for automation in wanted:
            there = client.read_automations_by_name(automation.name)
            if there:
                client.update_automation(there[0].id, automation)
            else:
                client.create_automation(automation)
    return [automation.name for automation in wanted]


def _block(client: SyncPrefectClient, name: str) -> UUID:
    kind, _, block = name.partition("/")
    try:
        return client.read_block_document_by_name(block, kind).id
    except ObjectNotFound:
        raise ServerError(
            f"notification block {name}", "Prefect has no such block", "<block type>/<block name>",
            "Make it on Prefect's page, under Blocks.",
        ) from None  # fmt: skip
