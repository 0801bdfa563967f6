from megatrain.cli import main

main()
