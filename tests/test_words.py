"""What error messages are made of."""

from gsanet.words import count, first_line, suggest


def test_suggestions():
    assert suggest("appel", ["apple", "pear"]) == "did you mean 'apple'?"
    assert suggest("zzz", ["apple", "pear"]) == "one of apple, pear"
    assert suggest("zzz", ["apple", "pear"], otherwise="see the list") == "see the list"


def test_counts():
    assert [count(number, "image") for number in (0, 1, 2, 1000)] == ["0 images", "1 image", "2 images", "1,000 images"]
    assert [count(number, "process", "processes") for number in (1, 2)] == ["1 process", "2 processes"]


def test_what_an_error_says_first():
    assert first_line(ValueError("\n  this\nthat")) == "this"
    assert first_line(KeyError()) == "KeyError"
