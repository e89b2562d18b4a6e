"""From many runs to answers, without MXNet: a module per question, and report_* per form of the answers."""
