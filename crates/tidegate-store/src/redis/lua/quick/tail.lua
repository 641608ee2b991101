
-- Expired slots are removed even if the call is refused, so that a clock that steps back doesn't restore them.
if is_refused and any_expired then break end
