  if offset$ then
    -- A number is printed for a call as if it had a fraction, which takes longer.
    call('SETRANGE', KEYS[at + $], string.format('%d', offset$), value$)
    if expires$ then call('PEXPIRE', KEYS[at + $], expires$) end
  elseif expires$ then
    call('SET', KEYS[at + $], value$, 'PX', expires$)
  else
    call('SET', KEYS[at + $], value$, 'KEEPTTL')
  end
