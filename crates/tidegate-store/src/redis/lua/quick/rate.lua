
local value$, expires$, write_offset$ = call('GET', KEYS[key_offset + $])
local kept_until$, tat$, tat_rest$ = 0, 0, 0
if value$ then
  if #value$ > 24 then break end
  kept_until$, tat$, tat_rest$ = unpack('<ddd', value$)
end
do
  local tat, rest, max_tat = tat$, tat_rest$, now + refill$
  if tat > max_tat or max_tat > NEVER or cost$ == 0 then break end
  if tat < now then
    tat, rest = now, 0
  end
  tat, rest = tat + cost_time$, rest + cost_rest$
  if rest >= 1024 then
    tat, rest = tat + 1, rest - 1024
  end
  if exceeds_capacity$ == 1 or tat > max_tat or (tat == max_tat and rest > refill_rest$) then
    if has_penalty$ then break end
    is_refused = true
  end
  local idle_at = rest > 0 and tat + 1 or tat
  if kept_until$ < idle_at or kept_until$ > idle_at + idle_at - now then
    kept_until$ = idle_at + floor((idle_at - now) / 4)
    expires$ = ceil((kept_until$ - now) / 1000) + expiry_margin
  end
  value$ = pack('<ddd', kept_until$, tat, rest)
end
