"""Released servers whose hooks are known, and the sources that these were written for (nemo-gym 0.7.0)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

Sources = Mapping[str, Mapping[str, str]]
"""Directory below `resources_servers` -> file in it -> its sha256."""


@dataclass(frozen=True, slots=True)
class Known:
    """Hooks of one server class. module, name: of the class of hooks, in this package. sources: the files that decide
    what the server keeps in a session."""

    module: str
    name: str
    sources: Sources


_GYMNASIUM: Final[Sources] = {
    "gymnasium": {
        "base.py": "d32a1aa94d83590ebd04a8c14f294beacd68492f16081084b10ccdd7320dbe55",
    },
}

KNOWN: Final[Mapping[str, Known]] = {
    "resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer": Known(
        "counter",
        "CounterHooks",
        {
            "example_session_state_mgmt": {
                "app.py": "9a47ec095b67e89ab2023c0636815826309621dd944f96b591cfcdd5afd8917c",
            },
        },
    ),
    "resources_servers.example_mcp_weather.app:ExampleMCPWeatherResourcesServer": Known(
        "weather",
        "McpWeatherHooks",
        {
            "example_mcp_weather": {
                "app.py": "dfc2d204a149e5bb79f464741c92b3e58994429f4b37f3a3ee6d52a522b1c993",
            },
        },
    ),
    "resources_servers.example_single_tool_call.app:SimpleWeatherResourcesServer": Known(
        "weather",
        "SimpleWeatherHooks",
        {
            "example_single_tool_call": {
                "app.py": "fe38ee9ea28be42ec72c011039753709efbdade6da9d253c40a7f6d46d4f6721",
            },
        },
    ),
    "resources_servers.workplace_assistant.app:WorkbenchResourcesServer": Known(
        "workplace",
        "WorkplaceHooks",
        {
            "workplace_assistant": {
                "app.py": "31e8514543ff8677464da6095431884dc61ee73e0d94906fad9b0affc4840904",
                "utils.py": "3d0f578251c25226a006c45ea2988eed61de45d8858a5eed79cc74ac63dce5d6",
            },
            "workplace_assistant/workplace_assistant_tools": {
                "analytics.py": "96fc35e61ceed6dc323485960cdf644ec8c7390421bb65eadab86b28a6a919e0",
                "calendar.py": "88016c51f7fcecc98897c1a4060bece2ee3804d60b5f85a80f85869303088fef",
                "company_directory.py": "7d5f3bbe1b2e6d6f41d1b8a06db0bc1c4eaacb423915b44e058af15fcd09c7dd",
                "customer_relationship_manager.py": "1db9d57324ce097aeb41cbdde06655442de0a34138293e90bdfeca6ae44a2b2c",
                "email.py": "2c710f6cc5d6d7d3b2830b4567dec8ab34bb04b2249765152bc41f2864a64ac5",
                "project_management.py": "1eccec5636e01dee6fcda583dbb6189b3a998c3f5572c2038194ac223995dbc9",
            },
        },
    ),
    "resources_servers.blackjack.app:BlackjackEnv": Known(
        "blackjack",
        "BlackjackHooks",
        {
            **_GYMNASIUM,
            "blackjack": {
                "app.py": "e0a800995a4860658efb6db6d5d9fe2a07b4b7d4573024771fe80b36e8daf4e2",
            },
        },
    ),
    "resources_servers.example_multi_turn_gymnasium.app:ExampleMultiTurnEnv": Known(
        "gymnasium",
        "MultiTurnHooks",
        {
            **_GYMNASIUM,
            "example_multi_turn_gymnasium": {
                "app.py": "9dc559a2c268834dde531df8e51114cea107bc86f0329b4e935e54d7d21f9c95",
            },
        },
    ),
    "resources_servers.wordle.app:WordleResourcesServer": Known(
        "wordle",
        "WordleHooks",
        {
            **_GYMNASIUM,
            "wordle": {
                "app.py": "6d00610f1f6cec7aca68bc0f36e6a131bdf583e46e8892957f9a3756ea070272",
            },
        },
    ),
    "resources_servers.indirect_prompt_injection.app:IPIResourcesServer": Known(
        "injection",
        "InjectionHooks",
        {
            "indirect_prompt_injection": {
                "app.py": "c189ee86504ca8d4434027a586fb7ac0fe99719e36465af72e7e845b905d9142",
                "common_tools.py": "fd57479d7dc87436273423bddbe164d091520d4b33a731272be96756d913855d",
                "ecommerce_tools.py": "7e84f9a026e64de3127669f86fd2941b3b8b383a893013dbee21253dbb4b3b63",
                "education_tools.py": "9e4897115a27f785031a374b7d89ff114054b729d0f42de741118698837d57c3",
                "healthcare_tools.py": "73f9280dd198a63bf24d9890a8e9c3a8a963c720c7353d7c98bea63d5415b7f5",
                "hr_tools.py": "a172822126fa565af12da1142bcd40c66a55495721a894171af5ff818d8c5b50",
                "insurance_tools.py": "e31b30b357d941930b368b0c3c893cf3747ddc7bfc669bd2a5adac526087cb89",
                "it_helpdesk_tools.py": "083dffe4f333a29858ff6cfb4bfd642da37904fe3eebc2be6ec88303781765c5",
                "legal_tools.py": "229108f4d6854dde85c71ac814fe2b58abcfdde7de01649339fd4dc992e5145e",
                "logistics_tools.py": "c96e764f791e9f1c6c736808263623dcfe6680fd842ddb52fe68c81cded722bc",
                "real_estate_tools.py": "82c808ae95fe42916bde54c62265d15c18100bf50dd0beb77b6596c74122d9b8",
            },
        },
    ),
}
"""By module and name of the server class."""
