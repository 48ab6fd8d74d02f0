"""Mail is optional: a link can always be copied by hand, and an alert stands on its page."""

from __future__ import annotations

from smtplib import SMTPException

import structlog
from django.conf import settings
from django.core.mail import send_mail

log = structlog.get_logger("oppo_platform.mail")


class MailNotSent(Exception):
    """The mail server did not take it, or there is none; the message says why."""


def send_link(to: str, subject: str, text: str) -> bool:
    """Mail a link, after the transaction that made it. False when no mail server is set up, or it did not take the mail."""
    if not settings.OPPO_SMTP_URL or "@" not in to:
        return False
    try:
        send_notice(to, subject, text)
    except MailNotSent as error:  # the link is on the screen as well
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
