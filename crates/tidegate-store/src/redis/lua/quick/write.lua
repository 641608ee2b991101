  if offset$ then
    -- A number is printed for a call as if it had a fraction, which takes longer.
    call('SETRANGE', KEYS[behind + $], string.format('%d', offset$), value$)
    if expires$ then call('PEXPIRE', KEYS[behind + $], expires$) end
  elseif expires$ then
    call('SET', KEYS[behind + $], value$, 'PX', expires$)
  else
    call('SET', KEYS[behind + $], value$, 'KEEPTTL')
  end
