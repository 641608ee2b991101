
-- What a log has lost is kept also where the call is refused, so that no clock brings it back.
if is_refused and were_changed then break end
