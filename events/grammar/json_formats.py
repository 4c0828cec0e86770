r"""Regular expressions of the JSON schema formats (`format`) that xgrammar 0.2.9 enforces.

They describe the text between the quotes of a JSON string. The formats are defined by RFC 5321 (email), 3339 (dates, times,
durations), 2673 and 4291 (IP addresses), 1123 (host names), 3986 (URIs), 6570 (URI templates) and 6901 (JSON pointers).
"""

_HEX = "[0-9A-Fa-f]"
_PERCENT = f"%{_HEX}{_HEX}"
_DATE = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
_HOUR_MINUTE = r"([01]\d|2[0-3]):[0-5]\d"
_TIME = rf"{_HOUR_MINUTE}:([0-5]\d|60)(\.\d+)?(Z|[+-]{_HOUR_MINUTE})"


def _email() -> str:
    atom = r"[\w!#$%&'*+/=?^`{|}~-]+"
    pair = r'\\\\([ !#-\[\]-~]|\\"|\\\\)'  # a quoted pair: its backslash is escaped once more, by JSON
    quoted = rf'\\"({pair}|[ !#-\[\]-~])*\\"'
    domain = r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9][A-Za-z0-9-]*[A-Za-z0-9])*"
    return rf"({atom}(\.{atom})*|{quoted})@{domain}"


def _duration() -> str:
    time = r"(\d+S|\d+M(\d+S)?|\d+H(\d+M(\d+S)?)?)"
    date = r"(\d+D|\d+M(\d+D)?|\d+Y(\d+M(\d+D)?)?)"
    return rf"P({date}(T{time})?|T{time}|\d+W)"


def _ipv6() -> str:
    group = "[0-9a-fA-F]{1,4}"
    byte = "(25[0-5]|(2[0-4]|1?[0-9])?[0-9])"
    ipv4 = rf"({byte}\.){{3}}{byte}"
    options = [f"({group}:){{7}}{group}", f"({group}:){{1,7}}:"]
    options += [f"({group}:){{1,{7 - after}}}(:{group}){{1,{after}}}" for after in range(1, 6)]
    options += [f"{group}:(:{group}){{1,6}}", f":((:{group}){{1,7}}|:)"]
    options += [f"::(ffff(:0{{1,4}})?:)?{ipv4}", f"({group}:){{1,4}}:{ipv4}"]
    return f"({'|'.join(options)})"


def _uri_parts() -> tuple[str, str, str, str]:
    """Return the patterns of four parts of a URI.

    They are: one character of a path, an authority with its path, the rest of a path, and a query with a fragment.
    """
    unreserved = r"\w.~!$&'()*+,;="
    character = f"([{unreserved}:@-]|{_PERCENT})"
    user = f"([{unreserved}:-]|{_PERCENT})*"
    host = f"([{unreserved}-]|{_PERCENT})*"
    path = f"(/{character}*)*"
    end = f"([{unreserved}:@/?-]|{_PERCENT})*"
    return character, rf"//({user}@)?{host}(:\d*)?{path}", path, rf"(\?{end})?(#{end})?"


def _uri() -> str:
    character, authority, path, end = _uri_parts()
    return f"[a-zA-Z][a-zA-Z+.-]*:({authority}|/?({character}+{path})?){end}"


def _uri_reference() -> str:
    character, authority, path, end = _uri_parts()
    segment = rf"([\w.~!$&'()*+,;=@-]|{_PERCENT})+"
    return f"({authority}|/({character}+{path})?|{segment}{path})?{end}"


def _uri_template() -> str:
    literal = rf"([!#$&(-;=?-\[\]_a-z~]|{_PERCENT})"
    variable = rf"(\w|{_PERCENT})"
    name = rf"{variable}(\.?{variable})*"
    item = rf"{name}(:[1-9]\d?\d?\d?|\*)?"
    return rf"({literal}|\{{([+#./;?&=,!@|])?{item}(,{item})*\}})*"


def _pointer() -> str:
    plain = r"[ !#-.0-\[\]-}\x7f-\U0010ffff]"
    return rf'(/({plain}|\\["\\/bfnrt]|\\u00[01]{_HEX}|~[01])*)*'


FORMATS = {
    "email": _email(),
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _duration(),
    "ipv4": r"((25[0-5]|2[0-4]\d|[01]?\d?\d)\.){3}(25[0-5]|2[0-4]\d|[01]?\d?\d)",
    "ipv6": _ipv6(),
    "hostname": r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": _uri(),
    "uri-reference": _uri_reference(),
    "uri-template": _uri_template(),
    "json-pointer": _pointer(),
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_pointer()})",
}
