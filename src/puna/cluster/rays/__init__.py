"""Ray: which machines there are, a node started on each, and the two ways to start a head. All of Puna that needs it is here."""
