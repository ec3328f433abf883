#!/bin/bash
# mini-swe-agent on the repository in the working folder. The prompt comes on standard input
exec "$(dirname "$0")/../../.venvs/mini-swe-agent/bin/python" -m minisweagent.run.mini \
  --model "openai/$OPENAI_MODEL" --yolo --exit-immediately --task "$(cat)" \
  -c mini.yaml -c agent.step_limit=6
