from moe_infinity.cli.app import main

main()
