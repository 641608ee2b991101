  if write_offset$ then
    -- First, so that a server that doesn't permit it has changed nothing.
    if expires$ then call('PEXPIRE', KEYS[key_offset + $], expires$) end
    -- As a number, the offset would be printed as a fraction for the call, which takes longer.
    call('SETRANGE', KEYS[key_offset + $], string.format('%d', write_offset$), value$)
  elseif expires$ then
    call('SET', KEYS[key_offset + $], value$, 'PX', expires$)
  else
    call('SET', KEYS[key_offset + $], value$, 'KEEPTTL')
  end
