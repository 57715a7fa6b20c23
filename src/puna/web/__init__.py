"""The page that the server shows to browsers: the files that a browser loads, and where they come from.

What is Puna's own lies in ``page/`` as a browser runs it. What is others' is fetched through npm when the package is built
(puna.web.libraries); without that the page works, and shows answers as plain text. Knows nothing of HTTP.
"""
