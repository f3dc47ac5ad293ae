"""`python -m evolving_client.ctl`."""

from evolving_client.ctl.app import main

main()
