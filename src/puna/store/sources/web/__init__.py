"""Large files over HTTP: which machines may be asked, requests and redirects, downloads in parts that can be taken up again."""
