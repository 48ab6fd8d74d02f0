"""Mail, which is optional: links are also shown for copying, and alerts on their page."""

from __future__ import annotations

from smtplib import SMTPException

import structlog
from django.conf import settings
from django.core.mail import send_mail

log = structlog.get_logger("oppo_platform.mail")


class MailNotSent(Exception):
    """The mail server refused it, or there is none; the message says why."""


def send_link(to: str, subject: str, text: str) -> bool:
    """Mail a link after the commit. False without a mail server, or if it refused the mail."""
    if not settings.OPPO_SMTP_URL or "@" not in to:
        return False
    try:
        send_notice(to, subject, text)
    except MailNotSent as error:  # the link is also on the page
        log.warning("mail_not_sent", to=to, detail=str(error))
        return False
    return True


def send_notice(to: str, subject: str, text: str) -> None:
    """Mail a text. Raises `MailNotSent`."""
    if not settings.OPPO_SMTP_URL:
        raise MailNotSent("No mail server is configured (OPPO_SMTP_URL).")
    try:
        send_mail(subject, text, None, [to])
    except (SMTPException, OSError) as error:
        raise MailNotSent(str(error)[:300] or type(error).__name__) from error
