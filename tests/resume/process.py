"""One server process: asks once, says how many tokens there are as they come, then what became of checkpoints.

python -m resume.process ROOT [COUNT [stored]], where it holds at COUNT tokens to be killed; `stored`: before it says so
it waits until the checkpoints taken so far are stored.
"""

import json
import sys
import time
from pathlib import Path

from resume.kit import NO_END, arguments, serving

ARGS = arguments(logit_bias=NO_END, max_tokens=200, top_p=0.95)
_LONGEST_WAIT_S = 120


def main(root: Path, hold_at: int = 0, is_stored: bool = False) -> None:
    def on_token(count: int) -> None:
        if count == hold_at and is_stored:
            server.checkpoints.flush(_LONGEST_WAIT_S)
        print(json.dumps({"count": count}), flush=True)
        if count == hold_at:
            time.sleep(_LONGEST_WAIT_S)

    with serving(root, every=7) as server:
        answer = server.ask(ARGS, on_token=on_token)
    stats = server.checkpoints.stats
    print(json.dumps({"tokens": answer.tokens, "text": answer.text, "resumed": stats.tokens_resumed}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]), is_stored=sys.argv[3:] == ["stored"])
