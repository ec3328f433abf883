"""The trainer in torch: network, ranks and their rendezvous. Knows no stages."""
