"""The table of audited servers: see `declared.py`. What another release needs: `tools/nemo_declarations.py`."""

from __future__ import annotations

from collections.abc import Mapping

from gym_ckpt_grpc.integrations.nemo_gym.declared import Declaration, Declared, Release

RELEASE = Release(
    "0.7.0",
    {
        "nemo_gym/base_resources_server.py": "ed9888242789f1e90ebdb0c4995d149bd3df13c6015f1d48a321c782c9d53d04",
        "nemo_gym/judge.py": "51c75e0f94e80e3b1ffcaede790032c0b51168a83c4cdc0d1a3bcf8e26be5ff4",
    },
)


def _server(
    name: str,
    server: str,
    saw: str,
    files: Mapping[str, str],
    *,
    judge: bool = False,
    allows: tuple[str, ...] = (),
) -> Declaration:
    """files: by path in the directory of the server; `../` leads to another one."""
    sources = {
        f"resources_servers/{name}/{file}".replace(f"/{name}/../", "/"): digest for file, digest in files.items()
    }
    return Declaration(f"resources_servers.{name}.app", server, saw, sources, judge, allows)


_SERVERS = (
    _server(
        "aalcr",
        "AalcrResourcesServer",
        "Fills a fixed judge prompt from the row and the answer; the verdict is the judge's word. Local names only.",
        {
            "app.py": "0fc588dc910e6a6de5c7a4ee38ae33745b384c0707baf40e2fd7450aa2921489",
        },
        judge=True,
    ),
    _server(
        "abstention",
        "AbstentionServer",
        "Takes the last boxed text by hand-written scanning, compares it with the token, else asks the judge "
        "on a deep copy of the params.",
        {
            "app.py": "2c15ee583ec6f6c89b5699cd046e4a674174b92941ed31d50858f35349e83574",
        },
        judge=True,
    ),
    _server(
        "arc_agi",
        "ARCAGIResourcesServer",
        "A regular expression and json.loads of the answer's grid, compared with the row's. Module functions only.",
        {
            "app.py": "3c237bd5b0299d7a4d155496ddea3b5289dfb72a8bdf05104bb2f6f9fdaf95f1",
        },
    ),
    _server(
        "calendar",
        "CalendarResourcesServer",
        "utils.py: times to minutes, first JSON list, conflicts and constraints compared with the row. No "
        "globals at all.",
        {
            "app.py": "68d09756346b4a90eb55e783f571e5ee0be98396e13c5117e6dc5a2be5c2ee22",
            "utils.py": "055626c5849f329f081ff6843111839cc89f025d0b2a1ef2b42ecc12975b27f4",
        },
    ),
    _server(
        "circle_click",
        "CircleClickResourcesServer",
        "Arguments of the first click call against the row's circles; the tool route echoes its body.",
        {
            "app.py": "89bb71863823e96bf704fefa1d784349cb4fde2a15a987774b72ab665d8badef",
        },
    ),
    _server(
        "circle_count",
        "CircleCountResourcesServer",
        "One number out of a box against a count over the row's circles.",
        {
            "app.py": "067389f1e6d0dc41cc9adfb18b2af9616a7370c55a479b077477ac5ae94bd3a1",
        },
    ),
    _server(
        "deepsearchqa",
        "DeepSearchQAServer",
        "Judge prompt read at start; counts the judge's booleans; precision, recall and F1 of them.",
        {
            "__init__.py": "39b67a3543de12fbe919327958818a53222b223688ef8ece33a12bc1e46d1f14",
            "app.py": "01229eff4951eedf35d069d9ecdf88daa9289f023a2145c78f9df8ce1f739394",
        },
        judge=True,
        allows=("self._judge_prompt (set at start only)",),
    ),
    _server(
        "equivalence_llm_judge",
        "LLMJudgeResourcesServer",
        "Regular expressions on the answer, one or two judge calls in a row; the semaphore only delays; the "
        "fixture file is test support that no request runs.",
        {
            "app.py": "7dd7227a28540c4b99b15ed934adc6ad24cf1dfe80af9081b3aaca96ecc6a765",
            "verifier_fixture.py": "3676953382582e011abb00b0811f00177388a6992026511c0eda4686c10f6519",
        },
        judge=True,
        allows=(
            "self._judge_endpoint_max_concurrency (semaphore gate)",
            "self._judge_prompt_template (set at start only)",
        ),
    ),
    _server(
        "equivalence_rule",
        "EquivalenceRuleResourcesServer",
        "SequenceMatcher or equality of two normalised texts; the rule table is a local name.",
        {
            "app.py": "0e221cb0aee0a5fb8e5ac91dbe2611d195c9528090ff0abcffa5a153f4017c55",
        },
    ),
    _server(
        "example_multi_step",
        "ExampleMultiStepResourcesServer",
        "The last tool call's numbers against the row's; sets only for their sizes; tool routes compute from "
        "their body.",
        {
            "app.py": "eaa35e6b69c14f7f2ecc6a854c988ac0ddad598a671a7efb4f7e0e1c663a044a",
        },
    ),
    _server(
        "example_tool_call_multireward",
        "ToolCallMultiRewardResourcesServer",
        "Three scores from the tool calls and the row; the tool route answers from its body.",
        {
            "app.py": "9ec763e0be15739c6cc736f7d9f11f6d9d2a7636c333d035ec2879a96b397496",
        },
    ),
    _server(
        "format_verification",
        "FormatVerificationResourcesServer",
        "Patterns of the row counted over the answer's lines, or markers looked for; the set is only asked "
        "for membership.",
        {
            "app.py": "eb96aed02e8b821fbe87b345c8c1739d27680982057bd7c75c3e51e46675d40c",
        },
    ),
    _server(
        "frontierscience_judge",
        "FrontierScienceJudgeServer",
        "Judge prompt read at start; verdict or score by regular expressions on the judge's text.",
        {
            "app.py": "1de3970b2576959c21fb31ea36d737c433edc1d6d0d976a66db9ca10893013e8",
        },
        judge=True,
        allows=("self._judge_prompt_template (set at start only)",),
    ),
    _server(
        "generative_reward_model",
        "GenerativeRewardModelResourcesServer",
        "score_parser.py scans for one JSON object; rewards are differences to the row's numbers. It logs, "
        "and nothing reads the log.",
        {
            "__init__.py": "dd7d5f5e544e1d2923bf4f1aa548504255938f58a6e74a119356573e6ce9e36e",
            "app.py": "8adc0f55633ec2bb79c74cbfc53a27c64b02343b802b318c0a156fb23add48a2",
            "score_parser.py": "2690a70514ba54a74f88ed351a28c3d09d2347f408d19febcd60125e1c9c2fb4",
        },
        allows=(
            "global logger = logging.getLogger()",
            "library logging.getLogger",
        ),
    ),
    _server(
        "gpqa_diamond",
        "GPQADiamondResourcesServer",
        "The verifier of mcqa with two regular expressions of its own.",
        {
            "app.py": "988a15e06752ac728df26e38b2890f15560518fa3021375427d30ae26b951acb",
            "../mcqa/app.py": "1fd2b412de8cac655a14bd2bc450b8530a0932408fcb8a90974f19438d423ae7",
        },
    ),
    _server(
        "graphwalks",
        "GraphWalksResourcesServer",
        "Node names of the last line; F1 of two sets by their sizes.",
        {
            "app.py": "2a7d9bf9ef725da20cdf2a7f9b23612a0f44312c434bef84920d8c0d2125a85c",
        },
    ),
    _server(
        "gui_coordinate",
        "GuiCoordinateResourcesServer",
        "A point by one compiled pattern, its distance to the row's.",
        {
            "app.py": "6e7fc6b9838ea3beafaa959a0f99548d3cdd2e9ff307f4b8504671a9a2860a1d",
        },
    ),
    _server(
        "inverse_if",
        "InverseIFServer",
        "One judge call per criterion, at once; gather keeps their order, so the verdict does not depend on "
        "which is answered first.",
        {
            "app.py": "5501ad7300ab4788cad47db63e05bdf0a55e8c61233cc036734261c6efac42ba",
        },
        judge=True,
        allows=("library asyncio.gather",),
    ),
    _server(
        "lc_niah",
        "LCNIAHResourcesServer",
        "F1 of two sets by their sizes, times an overlap by SequenceMatcher, n-grams or longest match. All "
        "static methods.",
        {
            "app.py": "cde7b1d94f6f20eb6467ec33e99879e03df0ab6f1b68ae848993b0c4c9b94fa5",
        },
    ),
    _server(
        "math_advanced_calculations",
        "MultiVerseMathHardResourcesServer",
        "Tool outputs of the trajectory against the row's numbers; the table of functions is only read, and "
        "each is arithmetic.",
        {
            "__init__.py": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "app.py": "31f01ff0c05a5cfcc57151d5471c44e3d8c1e6438b0472c0ebf02e8bce56a718",
            "math_advanced_calculations_tools.py": "edfab2ab63d8cc8fc1b404877c8043ad4789827cb53f49f1fb59dd6151a4ee1e",
        },
        allows=("class constant _function_map",),
    ),
    _server(
        "math_proof_judgement",
        "MathProofJudgementResourcesServer",
        "One pattern on the answer and on the row, compared; the rest of the file is metrics.",
        {
            "__init__.py": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "app.py": "44d02987173bb5d98b8277e30bd779ddbaa7b16ff9a2693d3c1af31b88eb10b3",
        },
    ),
    _server(
        "mcqa",
        "MCQAResourcesServer",
        "Patterns and boxed letters; the one set that is iterated has exactly one element there.",
        {
            "app.py": "1fd2b412de8cac655a14bd2bc450b8530a0932408fcb8a90974f19438d423ae7",
        },
        allows=("order of a set: matched_letters",),
    ),
    _server(
        "mrcr",
        "MRCRResourcesServer",
        "A prefix and SequenceMatcher.ratio() of two texts.",
        {
            "app.py": "f88e16c9596c52eea4db17f8ece280234f276bf12ba00b642494d7550f7554d2",
        },
    ),
    _server(
        "omniscience",
        "OmniscienceServer",
        "Judge prompt read at start; one judge call on a deep copy of the params, or a chat call built anew; "
        "a letter of its text.",
        {
            "app.py": "c1599ac3c050f5057c5541de9c389f33435a1a422b9ed36c009aa72a85c48b51",
        },
        judge=True,
        allows=("self._judge_prompt_template (set at start only)",),
    ),
    _server(
        "ruler",
        "RulerResourcesServer",
        "Counts the row's texts that occur in the answer.",
        {
            "app.py": "3c1f952f4910db7245262c7ed1609c3fbb31f57f67018c593a9c147c7527578c",
        },
    ),
    _server(
        "simpleqa",
        "SimpleQAServer",
        "Judge prompt read at start; one judge call on a deep copy of the params, or a chat call built anew; "
        "a letter of its text.",
        {
            "__init__.py": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "app.py": "b4986d6075d6e81753cbe449b14cd123db2b06b0bbf2fc6497a26918ddbde9f9",
        },
        judge=True,
        allows=("self._judge_prompt_template (set at start only)",),
    ),
    _server(
        "single_step_tool_use_with_argument_comparison",
        "SingleStepToolUseArgumentComparisonResourcesServer",
        "common/: compares calls recursively, and pairs them by augmenting paths over lists; a comparator per "
        "request that only reads its config.",
        {
            "__init__.py": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "app.py": "3617a4d6219c2412337bbd57afe744b70132e12f464a9b87ff8cd4780fa647b9",
            "common/__init__.py": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "common/response_utils.py": "e2a2fb7b5bc28a28cb4300b017e13729914578c9653fefc4eb776d67cae3fda5",
            "common/verification_utils.py": "41d82a49130adbf69fa9fca86c5f3eed28992ea6909e9dc05131b2830c0a1f89",
        },
    ),
    _server(
        "spartqa",
        "SpartqaResourcesServer",
        "Patterns, then the label that the answer contains; sets only for membership, order from lists and dicts.",
        {
            "app.py": "902b72c7629b2f467a5bd925355fed3b4827ce71f55e9e8b93665ae0ce4778c4",
        },
    ),
    _server(
        "string_match",
        "StringMatchResourcesServer",
        "Text normalisations one after the other; all tables are local or compiled patterns.",
        {
            "app.py": "610968753aebf296ca8c9f030d64cdea69bc7419616ebfcb2dfde6ad950af1ef",
        },
    ),
    _server(
        "swerl_llm_judge",
        "SWEJudgeResourcesServer",
        "In spite of its name no judge: a letter from the last solution block, sets only for membership.",
        {
            "app.py": "82ee78bee35f5f65ad253f14c5187b51dc1b8ef911012148858c326863ab6120",
        },
    ),
    _server(
        "xlam_fc",
        "XlamFcResourcesServer",
        "Predicted calls paired greedily with the row's, in order of the lists.",
        {
            "app.py": "844015f07d93c2ed3d41580dc5941ff05d2b54e831cc820c98c87cfd103324bb",
        },
    ),
)

TABLE = Declared(RELEASE, {declaration.key: declaration for declaration in _SERVERS})
